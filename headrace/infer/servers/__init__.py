"""Sample at inference servers, vLLM or SGLang, that run in processes and environments of their own.

- `api.py` defines what is asked of a server, and the values that pass; `json_http.py` sends the requests.
- `vllm.py` and `sglang.py` are the adapters: routes and bodies, nothing else.
- `token_stream.py` reads the tokens of one request; `server_sampler.py` makes one server a `Sampler`.
- `replicas.py` puts several servers behind one `Sampler`, and takes out, repairs and returns those that fail.
- `weight_sync.py` writes weights where servers read them; `proof.py` checks what a server holds afterwards.
- `fleet.py` owns the servers of a run and the sampler over them.
- `launch.py` starts and stops servers; `guardian.py` is the process between us and a server, which ends it with us.
"""
