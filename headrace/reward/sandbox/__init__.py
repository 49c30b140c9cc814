"""Run reward functions of users' files in worker processes with limits, isolated by what Linux offers, without Docker.

What is covered:
- Files: a read-only root with the interpreter, installed packages and the function's own code, and one private writable
  folder that is put back after each call (mount namespace, Landlock).
- Network: no interfaces, and no sockets but pairs of local streams (network namespace, seccomp).
- Processes: those outside can be neither seen nor signalled; those of a call are limited in number and end with it (PID
  namespace, a user of its own, RLIMIT_NPROC).
- Time, memory, output and result: a call that exceeds its limit is ended.
- Privileges: no capabilities, at import and in calls, no_new_privs, a deny list of system calls (seccomp).
- State: each call starts from the state after the import, with a fixed environment, no descriptors but its own and an
  empty stdin.
- Programs that a model wrote: `run_untrusted` isolates each from the function that judges it.
- Scores: a result carries a nonce that only its call was given, and is parsed field by field outside.

What is NOT covered:
- Exploits of the kernel, and side channels. Against a hostile author use a virtual machine.
- A function that lies about its own episode, and code that it executes in its own process: use `run_untrusted`.
- With `fork = "group"`: text of one episode that changes what later episodes of its group get.
- A function that makes its own evaluation fail: the episode is left out; `max_invalid_share` limits how many.
- Secrets in installed packages or the interpreter's folder: these are readable.
- `type = "inprocess"`: no isolation at all.
- Layers that this machine lacks: a warning names them once; `strict = true` refuses to run.

Files, from the trainer inwards:
- `pool`: `Sandbox`, which starts workers, sends them calls and replaces them when they end.
- `supervisor`: the process around a worker, which watches its memory and ends everything in it.
- `memory`: counts the memory of a call's processes, from outside.
- `cgroup`: limits the memory of all processes of a worker by the kernel, where this user may.
- `isolation`: builds the isolation layers around a process, and records which are active.
- `linux`: namespaces, mounts, capabilities, Landlock and seccomp by ctypes.
- `worker`: runs inside; imports the code once and forks each call.
- `scratch`: files that the import left in the private folder, for each call's own.
- `attendant`: exchanges requests and results with forked calls, and gives each its folder.
- `program`: `run_untrusted`, for programs that a model wrote.
- `limits`: limits, outcomes and layers, the vocabulary of both sides.
- `framing`: length-prefixed JSON between the processes.

docs/sandbox.md says who attacks and what each layer is for.
"""
