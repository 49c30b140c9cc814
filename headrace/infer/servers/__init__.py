"""Sample at inference servers, vLLM or SGLang, that run in processes and environments of their own.

- `api.py` defines what is asked of a server, and the values that pass; `json_http.py` sends the requests.
- `vllm.py` and `sglang.py` are the adapters: routes and bodies, nothing else;
  `wire_format.py` has the parts that both write alike.
- `token_stream.py` reads the tokens of one request; `server_sampler.py` makes one server a `Sampler`.
- `replicas.py` puts several servers behind one `Sampler`, and takes out, repairs and returns those that fail.
- `weight_sync.py` keeps the weights of a version for servers; `transfer/` brings them there, with `vllm_plugin/` inside
  vLLM.
- `proof.py` checks what a server holds afterwards, by log-probs; `checksums.py` by the server's own digests.
- `colocation.py` lets servers free their GPU memory while a trainer needs it.
- `fleet.py` owns the servers of a run and the sampler over them.
- `launch.py` starts and stops servers; `guardian.py` is the process between us and a server, which ends it with us.
"""
