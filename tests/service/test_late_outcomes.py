"""Outcomes that the journal cannot take, or takes without saying so: nobody waits for ever, no name is given twice."""

import asyncio
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import JournalError
from headrace.service.host.fake_host import FakeHost
from headrace.service.requests.request_table import Done, Failed
from headrace.service.store.journal import Journal
from headrace.service.store.ownership import claim
from support.direct_service import ALICE, direct_service
from support.tinker_sdk import Gate, until


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits before another attempt are short."""
    monkeypatch.setattr("headrace.service.requests.request_table.RETRY_S", 0.01)
    monkeypatch.setattr("headrace.service.training.training_queue.RETRY_S", 0.01)


class HeldOutcomes(Journal):
    """Keeps the answer to writing the outcome of one request in `held`, and writes nothing."""

    late = ""
    held: "Future[None] | None" = None

    def write(self, statements: Any) -> "Future[None]":
        outcome = any("UPDATE requests SET state" in sql and self.late in arguments for sql, arguments in statements)
        if not self.late or not outcome:
            return super().write(statements)
        self.held = Future()
        return self.held

    def fail(self) -> None:
        assert self.held is not None
        self.late = ""
        self.held.set_exception(JournalError("the disk is full"))


async def test_a_request_whose_cancelling_failed_still_gets_its_turn(tmp_path: Path) -> None:
    gate = Gate()
    async with direct_service(tmp_path, journal=HeldOutcomes, host=FakeHost(hold=gate)) as direct:
        journal = direct.service._journal
        assert isinstance(journal, HeldOutcomes)
        busy, model = await direct.model(), await direct.model()
        gate.close()
        others = [await direct.step(busy, seq) for seq in (1, 2, 3)]  # more than the host takes at once
        waiting = await direct.step(model, 1)
        journal.late = waiting.row.id
        cancelling = asyncio.create_task(direct.service.polling.cancel(ALICE, waiting.row.id))
        await asyncio.to_thread(until, lambda: journal.held)
        gate.open()
        for pending in others:  # turns are taken while the model has nothing waiting
            await direct.outcome(pending)
        journal.fail()
        with pytest.raises(JournalError):
            await cancelling
        assert isinstance(await asyncio.wait_for(direct.outcome(waiting), 20), Done)


async def test_of_two_snapshots_of_one_number_the_second_is_refused_while_the_first_is_not_recorded(
    tmp_path: Path,
) -> None:
    async with direct_service(tmp_path, journal=HeldOutcomes) as direct:
        journal = direct.service._journal
        assert isinstance(journal, HeldOutcomes)
        model, other = await direct.model(), await direct.model()
        journal.late = f"{model}:1"
        first = await direct.submit("save_weights_for_sampler", model, 1, sampling_session_seq_id=0)
        await asyncio.to_thread(until, lambda: journal.held)
        for one, seq in ((model, 2), (other, 1)):  # the number is the session's
            second = await direct.submit("save_weights_for_sampler", one, seq, sampling_session_seq_id=0)
            refused = await direct.outcome(second)
            assert isinstance(refused, Failed)
            assert "already" in refused.message
        journal.fail()
        assert isinstance(await direct.outcome(first), Done)
        third = await direct.submit("save_weights_for_sampler", model, 3, sampling_session_seq_id=1)
        assert isinstance(await direct.outcome(third), Done)


class LostAnswer(Journal):
    """Commits the first outcome, and says that it did not."""

    lost = False

    def write(self, statements: Any) -> "Future[None]":
        written = super().write(statements)
        if self.lost or not any("UPDATE requests SET state" in sql for sql, _ in statements):
            return written
        self.lost = True
        written.result()
        answer: Future[None] = Future()
        answer.set_exception(JournalError("the line was lost"))
        return answer


async def test_a_server_starts_again_behind_a_commit_whose_answer_was_lost(tmp_path: Path) -> None:
    async with direct_service(tmp_path, journal=LostAnswer) as direct:
        await direct.model()
    with closing(Journal(str(tmp_path / "journal.sqlite"))) as journal:
        claim(tmp_path, journal)
