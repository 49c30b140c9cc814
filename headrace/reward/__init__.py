"""Rewards: functions of a finished episode, and the runner that calls them and adds up what they say."""
