"""The process itself: how Ctrl-C ends it early, its threads, and what it waits for.

- `early_interrupt`: ends a process on Ctrl-C before it has begun anything.
- `thread_pool`: starts the threads of an event loop's pool at once.
- `watchdog`: tells what has not moved for long, with the stacks of all threads.
- `last_threads`: ends a process whose work is done although threads of it still run.
- `mkl`: asks MKL for products whose rows do not depend on each other.
"""
