"""Old names of configuration keys and values: still read, each with a warning that says the new name.

The tables hold for a run's file, for its overrides (`--set`) and for serve.toml. A run folder has the new names.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headrace.config.introspect import keys
from headrace.config.schema import SourceConfig
from headrace.errors import ConfigError

# old key -> new key
OLD_KEYS: Mapping[str, str] = {
    "engine.max_rows": "engine.max_num_seqs",
    "engine.piece_tokens": "engine.prefill_chunk_tokens",
    "engine.graphs": "engine.cuda_graphs",
    "rl.rows": "rl.sequence_unit",
    "rl.truncated": "rl.truncated_reward",
    "rl.async.keep": "rl.async.select",
    "rl.async.score": "rl.async.select_score",
    "rl.async.batch_groups": "rl.groups",
}
# `type` of a source: old value -> new value
OLD_SOURCE_TYPES: Mapping[str, str] = {"world": "env"}
SOURCE_TYPE_KEYS = tuple(path for path, cls, name in keys() if cls is SourceConfig and name == "type")


def use_new_names(tree: Mapping[str, Any], *, override: str | None = None) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Replace the old names in a parsed TOML file; return the new tree and one sentence for each old name.

    `override` is the key that an override has just put into a tree of new names: its value wins over that of the new
    key. Otherwise ConfigError is raised if the old and the new key are both there and differ.

    >>> use_new_names({"engine": {"max_rows": 8}})
    ({'engine': {'max_num_seqs': 8}}, ("'engine.max_rows' is now called 'engine.max_num_seqs': write the new name",))
    """
    renamed = copy.deepcopy(dict(tree))
    warnings = []
    for old, new in OLD_KEYS.items():
        *old_tables, old_name = old.split(".")
        *new_tables, new_name = new.split(".")
        for table in _tables(renamed, old_tables):
            if old_name not in table:
                continue
            targets = list(_tables(renamed, new_tables))
            if len(targets) != 1:  # an array where a table belongs, which the loader refuses
                continue
            value, target = table.pop(old_name), targets[0]
            if override != old and target.get(new_name, value) != value:
                raise ConfigError(
                    f"'{old}' is {value} and '{new}' is {target[new_name]}, but the first is the old name of the "
                    "second: leave it out"
                )
            target[new_name] = value
            warnings.append(f"'{old}' is now called '{new}': write the new name")
    return renamed, (*warnings, *_rename_source_types(renamed))


def new_key(key: str) -> str:
    """Return the new name of a dotted key; a key without one is returned as it is.

    >>> new_key("rl.async.keep"), new_key("rl.steps")
    ('rl.async.select', 'rl.steps')
    """
    return OLD_KEYS.get(key, key)


def old_names_in(table: str) -> dict[str, str]:
    """Map the old names of the keys of a table to the new dotted keys.

    >>> old_names_in("rl")
    {'rows': 'rl.sequence_unit', 'truncated': 'rl.truncated_reward'}
    """
    return {old.rpartition(".")[2]: new for old, new in OLD_KEYS.items() if old.rpartition(".")[0] == table}


def _rename_source_types(tree: dict[str, Any]) -> Iterator[str]:
    used = set()
    for key in SOURCE_TYPE_KEYS:
        *tables, name = key.split(".")
        for source in _tables(tree, tables):
            old = source.get(name)
            if isinstance(old, str) and old in OLD_SOURCE_TYPES:
                source[name] = OLD_SOURCE_TYPES[old]
                used.add(old)
    for old in sorted(used):
        yield f"'type = \"{old}\"' of a source is now called 'type = \"{OLD_SOURCE_TYPES[old]}\"': write the new name"


def _tables(tree: Any, path: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the tables at a path such as ("sft", "sources[]"); a file that has something else there is left alone."""
    if not isinstance(tree, dict):
        return
    if not path:
        yield tree
        return
    value = tree.get(path[0].removesuffix("[]"))
    for item in value if isinstance(value, list) else [value]:
        yield from _tables(item, path[1:])
