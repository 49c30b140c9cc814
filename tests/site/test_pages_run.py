"""The pages of docs/start and docs/how-to run from the first block to the last, with a tiny model of a local hub."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.site_blocks import ROOMS, blocks_of, is_run, site_pages
from support.site_runs import Machine, machine, page_run

PAGES = [page for page in site_pages() if page.startswith(ROOMS)]


@pytest.fixture(scope="module")
def hub_and_commands() -> Iterator[Machine]:
    with machine() as made:
        yield made


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs(page: str, hub_and_commands: Machine, tmp_path: Path) -> None:
    with page_run(hub_and_commands, tmp_path) as state:
        for block in blocks_of(page):
            if is_run(block):
                state.run(block)
