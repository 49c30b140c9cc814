"""Sampling requests: accepted, queued by owner, executed many at a time.

- `sampling_requests`: open sampling sessions; check, journal and queue a request.
- `sample_job`: parse a request into a job for the host.
- `sampling_queue`: queue jobs, owners taking turns.
- `sample_execution`: run a job on an open sampler.
- `sampler_cache`: open samplers, evicted when others need the room.
"""
