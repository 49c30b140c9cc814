"""The rollout executor: plays groups within the staleness bound and hands them to the trainer in batches.

    executor.py       `RolloutExecutor`: the tasks and waits drawn below
    build.py          build an executor with its parts from `AsyncSettings`
    settings.py       `AsyncSettings`, built once from [rl.async]
    parts.py          `ExecutorParts`: what a caller may bring in place of our stores, scorer and staleness rule
    state.py          `ExecutorState`: every group's state and all transitions between states; what a checkpoint saves
    ledger.py         count groups by state; every drop has a reason
    ready_buffer.py   finished groups that wait to be trained
    replay_buffer.py  trained groups that may be trained again
    admission.py      decide how many groups may start now
    task_runner.py    run each group as an asyncio task and turn every ending into an outcome
    selection.py      choose the batch when more groups are ready than needed
    turns.py          hand devices over between sampling and training, where both together do not fit
    drops.py          consecutive drops, slow tasks, and the text of errors about groups that do not end
    stats.py          metrics since the last report, and sampler utilisation

Three kinds of tasks, and which wakes which (`~~>` wakes, `-->` starts or cancels):

    trainer's task                      settler task, one loop              one task per running group
    ---------------------------------   ---------------------------------   ------------------------------------
    take_batch                          wait for outcomes <~~~~~~~~~~~~~~   the task has ended (done callback):
      admit ---------------------+      settle each: ready or dropped         value, error, timeout, cancelled
      until the batch is ready:  |      admit ----------------------+
        drop stale groups        +----------------------------------+---->  GroupPlayer(task, group_id)
        wait for `_progress` <~~~~~~~~  set `_progress`                       SamplingGate.enter
      take the oldest groups                                                  sampler.sample
      eta = 0: cancel the surplus --------------------------------------->    SamplingGate.leave
                                                                              ... every turn of every episode
    done: the batch is consumed                                               rewards

    publish
      wait for slow tasks <~~~~~~~~~~~  set `_progress`
      SamplingGate.hold                                                     SamplingGate.enter waits from here
      Publisher: pause the samplers ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~>  sampler.sample returns what it has
        score under the old version
        load, version + 1
        drop stale groups
        cancel groups too old to end ------------------------------------>  cancelled
        resume the samplers
      SamplingGate.release ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~>  SamplingGate.enter returns
      admit ------------------------------------------------------------->  GroupPlayer(task, group_id)

All run on one event loop and the state changes only between awaits, so it needs no lock. If the settler dies, its done
callback sets `_progress`, and take_batch raises its error.

In lockstep (`lockstep_tokens`) the settler only collects outcomes and sets `_progress`; so does every call that arrives
at the gate or leaves it. The trainer's task does the rest, round by round:

    take_batch, until the batch is ready:
      wait for `_progress` until every group has ended or waits at the gate
      settle in the order of ids, admit
      SamplingGate.next_round ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~>  SamplingGate.enter returns
"""

from headrace.rollout.executor.build import TaskStream, build_executor
from headrace.rollout.executor.executor import Play, RolloutExecutor
from headrace.rollout.executor.parts import ExecutorParts
from headrace.rollout.executor.settings import AsyncSettings, StaleAction

__all__ = ["AsyncSettings", "ExecutorParts", "Play", "RolloutExecutor", "StaleAction", "TaskStream", "build_executor"]
