"""Stand-ins for the packages reward-kit and eval-protocol, so that reward functions written for them run unmodified."""
