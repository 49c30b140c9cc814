"""Property tests have no deadline: the first example pays for imports and allocation."""

from hypothesis import settings

settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")
