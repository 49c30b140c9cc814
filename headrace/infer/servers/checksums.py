"""Compare the checksums that a server makes of its own tensors with those of the weights that it was given.

A server names tensors as it holds them: some are fused of several of a checkpoint, and some are padded, cut over
workers or hashed in a way of its own. So no rule says which digests are of our bytes; the start does. Once log-probs
have shown that a server holds the first version, the digests that are the SHA-256 of our tensors then must be so for
every later version. Of the others it is known when they have to change: when the tensors they are made of do.

Checksums that leave tensors out prove nothing: vLLM on CPU packs linear layers away and hashes nothing. A server whose
checksums do not cover every tensor is proven by log-probs alone.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

Sources = Mapping[str, tuple[str, ...]]  # by a server's name: our tensors, one after another


def find_sources(found: Iterable[str], ours: Iterable[str]) -> Sources:
    """Find the tensors of a checkpoint that each tensor of a server is made of; those with none are left out.

    >>> find_sources(["dp0:pp0:pcp0:tp0:a.qkv_proj.weight", "0:norm.weight", "cos_sin_cache"],
    ...              ["a.q_proj.weight", "a.k_proj.weight", "a.v_proj.weight", "norm.weight"])
    {'dp0:pp0:pcp0:tp0:a.qkv_proj.weight': ('a.q_proj.weight', 'a.k_proj.weight', 'a.v_proj.weight'), \
'0:norm.weight': ('norm.weight',)}
    """
    names, sources = set(ours), dict[str, tuple[str, ...]]()
    for full in found:
        name = full.rpartition(":")[2]
        candidates: list[tuple[str, ...]] = [(name,)]
        for fused, parts in FUSED.items():
            if f".{fused}." in name:
                candidates.append(tuple(name.replace(f".{fused}.", f".{part}.") for part in parts))
        for candidate in candidates:
            if names.issuperset(candidate):
                sources[full] = candidate
    return sources


def missing_tensors(sources: Sources, ours: Iterable[str]) -> list[str]:
    """Return the tensors that no checksum covers. A head that a server ties to the embedding is covered by that."""
    seen = {name for parts in sources.values() for name in parts}
    return sorted(set(ours) - seen - {"lm_head.weight"})


def digests_of(readers: Mapping[str, Callable[[], Tensor]], sources: Sources) -> dict[str, str]:
    """Return the SHA-256 of the bytes of the tensors that each of a server's is made of, by the server's name.

    One tensor at a time is read.
    """
    digests = {}
    for full, parts in sources.items():
        digest = hashlib.sha256()
        for part in parts:
            digest.update(_bytes(readers[part]()).numpy())  # type: ignore[arg-type]
        digests[full] = digest.hexdigest()
    return digests


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldChecksums:
    """The checksums of a server that holds a version, beside ours of the same version."""

    found: Mapping[str, str]
    ours: Mapping[str, str]
    exact: frozenset[str]  # names whose digests are the SHA-256 of our bytes

    @classmethod
    def first(cls, found: Mapping[str, str], ours: Mapping[str, str]) -> "HeldChecksums":
        """Learn, of a server that is known to hold a version, which of its digests are of our bytes."""
        return cls(found=found, ours=ours, exact=frozenset(name for name in ours if found[name] == ours[name]))

    def wrong_after(self, found: Mapping[str, str], ours: Mapping[str, str]) -> Sequence[str]:
        """Return the names whose digests cannot be of the weights that were given after these."""
        wrong = []
        for name, digest in ours.items():
            if name in self.exact:
                right = found.get(name) == digest
            else:
                right = (found.get(name) != self.found[name]) == (digest != self.ours[name])
            if not right:
                wrong.append(name)
        return wrong


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
