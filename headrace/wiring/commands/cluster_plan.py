"""Say which processes a run would have and where they would be placed; starts none of them."""

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

from headrace.cluster.connection import LOCAL, ClusterNode, RolePlaces, look_up_nodes, spread
from headrace.cluster.runtime import ENGINE, RANK, REFERENCE, REWARD, ROLLOUT
from headrace.config import Config
from headrace.errors import ConfigError
from headrace.model.memory import choose_placement
from headrace.observe.explain_text import chosen_text
from headrace.observe.machine import machine_facts
from headrace.wiring.build.cluster_roles import role_places

NAMES = {
    ENGINE: "engine replica",
    ROLLOUT: "rollout worker",
    REWARD: "reward worker",
    REFERENCE: "reference worker",
    RANK: "further rank",
}


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
    on_gpu = False
    chosen = f"  the model is trained and sampled at {config.model.service}"
    if config.model.service is None:
        placement = choose_placement(
            device=config.model.device,
            dtype=config.model.dtype,
            gpus=[gpu["name"] for gpu in facts["gpus"]],
            mps=bool(facts["torch"].get("mps")),
        )
        on_gpu, chosen = placement.device == "cuda", chosen_text(placement)
    wanted = role_places(config, stage="rl", samples=True, on_gpu=on_gpu)
    if c.ranks > 1 and c.address not in ("", LOCAL):
        wanted[RANK] = RolePlaces(count=c.ranks - 1, gpus=1 if on_gpu else 0)
    roles = [(f"{NAMES[role]} {index}", places) for role, places in wanted.items() for index in range(places.count)]
    here = c.ranks if c.ranks > 1 and RANK not in wanted else 1
    engines = c.engine_replicas if ENGINE not in wanted else 0  # that the run starts itself
    yield f"{file}: {here + engines + len(roles)} processes"
    engine = "" if c.engine_replicas or config.engine.is_served else "the engine, "
    yield f"coordinator (this process): the loop, the trainer, {engine}evaluations and all files"
    if here > 1:
        yield f"  {here} ranks on this machine train together, this process among them"
    if engines:
        yield f"  {engines} engine replicas on this machine sample"
    yield chosen
    if not c.address:
        yield 'no cluster: this process plays and scores as well; write cluster.address = "local" for workers'
        return
    if c.address == LOCAL:
        cpus = facts["cpu"]["usable_threads"]
        yield f"a Ray on this machine, started for the run: {len(roles)} places on {cpus} CPUs"
        yield from (f"  {name}: this machine" for name, _ in roles)
        return
    yield f"the Ray at {c.address}: {len(roles)} places"
    yield from (
        f"  node {node.address}: {node.free_cpus:g} of {node.cpus:g} CPUs are free, {node.free_gpus:g} GPUs"
        for node in nodes
    )
    bundles = [bundle for places in wanted.values() for bundle in places.bundles]
    chosen_nodes = spread(nodes, bundles)
    if chosen_nodes is None:
        room = next(count for count in range(len(bundles), -1, -1) if spread(nodes, bundles[:count]) is not None)
        waits = f"the run would wait {c.deadline_s:g} s and then end"
        yield f"  there is room for {room} of {len(bundles)} processes: {waits}"
        return
    for (name, places), node in zip(roles, chosen_nodes, strict=True):
        gpus = f" with {places.gpus:g} GPUs" if places.gpus else ""
        yield f"  {name}{gpus}: about {node.address}"
