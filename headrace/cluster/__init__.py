"""Roles of a run in processes of their own, placed by Ray: rollout workers play groups, reward workers score them,
reference workers hold frozen models, engine replicas sample and ranks train.

The coordinator is the process of the run: it has the loop, the trainer, the engine unless replicas sample, and all
buffers. Its executor plays groups through `ClusterGroupPlayer`, which sends each whole group to one rollout worker. The
worker runs environments and episodes with the classes that run in one process. Where the engine is in the coordinator,
every turn comes back to it, is sampled there through the group's partial rollout, and the tokens go out again:

    coordinator                                              rollout worker (a Ray actor)
    ------------------------------------------------------   ---------------------------------------------
    executor -> ClusterGroupPlayer -- play(task, group id) ->  GroupPlayer.play_episodes
                 PartialEpisode.sample <-- prompt ----------     LinkedEpisode.sample, environments
                 SamplingGate, engine  --- tokens --------->
                 <--------------------------- episodes -----
                 RewardRunner, or ClusterRewardRunner --------> reward worker (a Ray actor): GroupRewardRunner

So the gate, interrupted turns, staleness and checkpoints are where they are without a cluster. A worker that dies takes
nothing with it but its environments: the group is sent to another one, where recorded turns are played back.

Where engine replicas sample, the coordinator lends one for each turn, and prompts and tokens go between worker and
replica. Gate, pauses, and the choice of a replica stay with the coordinator; it gets the tokens with the episodes, when
a group has ended:

    coordinator                                  rollout worker                            engine replica
    ------------------------------------------   ---------------------------------------   ------------------------
    SamplingGate, ReplicaSampler.lend <-- LeaseCall -- LinkedEpisode.sample
                                      --- Lease ---->  EngineAccess.sample -- request --->  EngineActor, or a server
                                      <-- LeaseEnd --                      <-- tokens ----

- `connection`: connect to Ray or start one on this machine, and reserve places, with a log line of what is missing.
- `worker_pool`: keep a fixed number of workers of a role alive, each in its place.
- `role_worker`: what all workers have in common: messages to the coordinator, answers, and their log.
- `rollout_worker`: play groups, and sample at the coordinator or at replicas.
- `reward_worker`: score groups.
- `group_player`: the coordinator's side of rollout workers.
- `reward_runner`: the coordinator's side of reward workers.
- `reference_worker`: score with frozen models; both sides.
- `engine_access`: sample at replicas that the coordinator lends; the messages of it.
- `placed_engine`: run embedded engines on nodes; both sides.
- `engine_replica`: run inference servers on nodes; both sides.
- `rank_host`: start trainer ranks on nodes.
- `runtime`: open the workers of a run, and close them.

Knows no configuration: `wiring` says what a worker builds. Ray is imported when a cluster is opened.
"""
