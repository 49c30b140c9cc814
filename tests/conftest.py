"""Settings of all tests."""

from hypothesis import settings

settings.register_profile("headrace", deadline=None)  # a busy machine is no failure; pytest limits every test's time
settings.load_profile("headrace")
