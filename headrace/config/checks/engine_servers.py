"""Check servers in [engine]: vLLM and SGLang as samplers."""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from headrace.config.introspect import default_of
from headrace.config.schema import Config, EngineConfig, RlConfig

EMBEDDED_KEYS = ("max_num_seqs", "kv_tokens", "prefill_chunk_tokens", "cuda_graphs")
LARGEST_VLLM_RANK = 512


def server_problems(config: Config) -> Iterator[str]:
    """Yield what cannot work with the servers of [engine]."""
    engine, lora = config.engine, config.model.lora
    if not engine.is_served:
        for key in ("urls", "launch", "sync_folder", "sync"):
            if key == "sync_folder" and config.cluster.engine_replicas:
                continue  # engine processes read weights from there, too
            if getattr(engine, key) != default_of(EngineConfig, key):
                yield (
                    f"'engine.{key}' is for inference servers, but 'engine.type' is \"{engine.type}\": "
                    'write "vllm" or "sglang", or leave it out'
                )
        return
    yield from _address_problems(engine)
    yield from _sync_problems(engine, adapters=lora is not None, device=config.model.device)
    for key in EMBEDDED_KEYS:
        if getattr(engine, key) != default_of(EngineConfig, key):
            yield (
                f"'engine.{key}' is of the embedded engine, but 'engine.type' is \"{engine.type}\": leave it out, and "
                "give the server its own option ('engine.launch.args')"
            )
    if lora is not None and "lm_head" in lora.layers:
        yield "'model.lora.targets' has lm_head, whose adapter inference servers do not load: leave it out"
    if beside := [name for name in ("experts", "router") if lora is not None and name in lora.layers]:
        yield f"'model.lora.targets' has {beside[0]}, whose adapter is sampled from by the embedded engine alone"
    if lora is not None and engine.type == "vllm" and lora.rank > LARGEST_VLLM_RANK:
        yield f"'model.lora.rank' is {lora.rank}, and vLLM takes {LARGEST_VLLM_RANK} at most: lower it"
    if config.run.deterministic:
        yield (
            "'run.deterministic' asks for the same bits in every run, which inference servers do not promise: "
            "leave it out, or 'engine.type'"
        )
    if config.rl is not None:
        yield from _rl_problems(config.rl, engine, adapters=lora is not None)


def _address_problems(engine: EngineConfig) -> Iterator[str]:
    if engine.urls and engine.launch is not None:
        yield "'engine.urls' and [engine.launch] both say where servers are: leave one of them out"
    if not engine.urls and engine.launch is None:
        yield (
            f"'engine.type' is \"{engine.type}\", and nothing says where its servers are: "
            "add 'engine.urls', or a table [engine.launch]"
        )
    for url in engine.urls:
        if not url.startswith(("http://", "https://")):
            yield f"'engine.urls' has \"{url}\": it must start with http:// or https://"
    if len(set(engine.urls)) < len(engine.urls):
        yield "'engine.urls' names a server twice: leave one out"
    launch = engine.launch
    if launch is None:
        return
    if not Path(launch.python).expanduser().is_file():
        yield (
            f"'engine.launch.python' is \"{launch.python}\", which is no file: name the interpreter of an environment "
            f"that has {engine.type} (docs/engines.md)"
        )
    if launch.gpus and len(launch.gpus) != launch.replicas:
        yield (
            f"'engine.launch.gpus' has {len(launch.gpus)} entries and 'engine.launch.replicas' is {launch.replicas}: "
            "write one for each server, or leave it out"
        )


def _sync_problems(engine: EngineConfig, *, adapters: bool, device: str) -> Iterator[str]:
    if engine.sync == "folder":
        return
    if adapters:
        yield (
            f"'engine.sync' is \"{engine.sync}\", and the adapters of [model.lora], which are small, are loaded from "
            "folders: leave it out"
        )
    if engine.sync != "ipc":
        return
    if device in ("cpu", "mps"):
        yield (
            f"'engine.sync' is \"ipc\", which shares the memory of a GPU, and 'model.device' is \"{device}\": leave "
            "one of them out"
        )
    for url in engine.urls:
        if urlsplit(url).hostname not in ("localhost", "127.0.0.1", "::1"):
            yield f'\'engine.sync\' is "ipc", which works on one machine, and {url} may be another: write "broadcast"'


def _rl_problems(rl: RlConfig, engine: EngineConfig, *, adapters: bool) -> Iterator[str]:
    c, sampling = rl.asynchronous, rl.sampling
    if sampling.top_p < 1.0 or sampling.top_k is not None or sampling.min_p > 0.0:
        yield (
            "'rl.sampling' cuts tokens from the distribution, and an inference server tells log-probs of what is left, "
            "not of the distribution that is trained: leave top_p, top_k and min_p out"
        )
    if c.lockstep_tokens:
        yield (
            "'rl.async.lockstep_tokens' repeats a run exactly, and an inference server draws other tokens after an "
            "interruption: leave it out"
        )
    scores = c.behaviour_weight == "one_step" and c.max_staleness >= 2
    if scores and sampling.temperature != 1.0:
        yield (
            "'rl.async.behaviour_weight' = \"one_step\" scores with the sampler, and an inference server scores at "
            "temperature 1 only: write 'rl.sampling.temperature = 1.0', or another weight"
        )
    if c.interrupt != "inflight":
        return
    if engine.type == "sglang":
        yield '\'rl.async.interrupt\' = "inflight" is not supported with SGLang: write "abort" or "drain"'
    if adapters:
        yield (
            "'rl.async.interrupt' = \"inflight\" cannot be used with adapters: a server's open requests keep the "
            'adapter they began with; write "abort" or "drain"'
        )
    if scores:
        yield (
            "'rl.async.interrupt' = \"inflight\" freezes the server, which then cannot score for "
            '\'rl.async.behaviour_weight\' = "one_step": write "abort" or "drain"'
        )
