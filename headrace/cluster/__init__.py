"""Roles of a run in processes of their own, placed by Ray: rollout workers play groups, reward workers score them.

The coordinator is the process of the run: it has the loop, the trainer, the engine and all buffers. Its executor plays
groups through `ClusterGroupPlayer`, which sends each whole group to one rollout worker. The worker runs environments
and episodes with the classes that run in one process; every turn comes back to the coordinator, is sampled there
through the group's partial rollout, and the tokens go out again:

    coordinator                                              rollout worker (a Ray actor)
    ------------------------------------------------------   ---------------------------------------------
    executor -> ClusterGroupPlayer -- play(task, group id) ->  GroupPlayer.play_episodes
                 PartialEpisode.sample <-- prompt ----------     LinkedEpisode.sample, environments
                 SamplingGate, engine  --- tokens --------->
                 <--------------------------- episodes -----
                 RewardRunner, or ClusterRewardRunner --------> reward worker (a Ray actor): GroupRewardRunner

So the gate, interrupted turns, staleness and checkpoints are where they are without a cluster. A worker that dies takes
nothing with it but its environments: the group is sent to another one, where recorded turns are played back.

- `connection`: connect to Ray or start one on this machine, and wait for room with a log line of what is missing.
- `worker_pool`: keep a fixed number of workers of a role alive, each in its place.
- `role_worker`: what all workers have in common: messages to the coordinator, answers, and their log.
- `rollout_worker`: play groups, and sample at the coordinator.
- `reward_worker`: score groups.
- `group_player`: the coordinator's side of rollout workers.
- `reward_runner`: the coordinator's side of reward workers.
- `runtime`: open all roles of a run, and close them.

Knows no configuration: `wiring` says what a worker builds. Ray is imported when a cluster is opened.
"""
