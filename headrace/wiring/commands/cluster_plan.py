"""Say which processes a run would have and where they would be placed; starts none of them."""

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

from headrace.cluster.connection import LOCAL, ClusterNode, look_up_nodes, spread
from headrace.config import Config
from headrace.config.checks.cluster import rollout_workers
from headrace.errors import ConfigError
from headrace.model.memory import choose_placement
from headrace.observe.explain_text import chosen_text
from headrace.observe.machine import machine_facts


def plan_cluster(config: Config, *, file: str) -> str:
    """Return the plan. Packages are imported before anything is claimed of them. Raises ConfigError or RolloutError."""
    facts = machine_facts(("torch", "ray"))
    c = config.cluster
    nodes: tuple[ClusterNode, ...] = ()
    if c.address:
        if not facts["packages"]["ray"]["ok"]:
            reason = facts["packages"]["ray"]["reason"]
            raise ConfigError(f"cluster.address needs Ray, which cannot be imported ({reason}): headrace[ray] has it")
        if c.address != LOCAL:
            nodes = asyncio.run(look_up_nodes(c.address, deadline_s=c.deadline_s))
    return "\n".join(_lines(config, file, facts, nodes)) + "\n"


def _lines(config: Config, file: str, facts: Mapping[str, Any], nodes: tuple[ClusterNode, ...]) -> Iterator[str]:
    c = config.cluster
    roles = [f"rollout worker {index}" for index in range(rollout_workers(c))]
    roles += [f"reward worker {index}" for index in range(c.reward_workers)]
    yield f"{file}: {1 + len(roles)} processes"
    yield "coordinator (this process): the loop, the trainer, the engine, evaluations and all files"
    if config.model.service is not None:
        yield f"  the model is trained and sampled at {config.model.service}"
    else:
        placement = choose_placement(
            device=config.model.device,
            dtype=config.model.dtype,
            gpus=[gpu["name"] for gpu in facts["gpus"]],
            mps=bool(facts["torch"].get("mps")),
        )
        yield chosen_text(placement)
    if not c.address:
        yield 'no cluster: this process plays and scores as well; write cluster.address = "local" for workers'
        return
    if c.address == LOCAL:
        cpus = facts["cpu"]["usable_threads"]
        yield f"a Ray on this machine, started for the run: {len(roles)} places on {cpus} CPUs"
        yield from (f"  {role}: this machine" for role in roles)
        return
    yield f"the Ray at {c.address}: {len(roles)} places of one CPU"
    yield from (f"  node {node.address}: {node.free_cpus:g} of {node.cpus:g} CPUs are free" for node in nodes)
    places = spread(nodes, len(roles))
    if places is None:
        free = sum(int(node.free_cpus) for node in nodes)
        yield f"  there is room for {free} of {len(roles)} workers: the run would wait {c.deadline_s:g} s and then end"
        return
    yield from (f"  {role}: about {place.address}" for role, place in zip(roles, places, strict=True))
