"""Run embedded engines in processes of their own, each with a full copy of the weights.

- `engine_host.py` is the class that such a process works with: the verbs of one engine.
- `host_process.py` is the program of the process: it answers calls that come over a socket.
- `messages.py` frames what goes over the socket.
- `engine_process.py` starts, calls and ends such a process.
- `embedded_replica.py` makes one a replica of `servers/replicas.py`.
- `parameter_folders.py` writes the trainer's weights where the processes read them.
"""
