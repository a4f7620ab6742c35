"""Continuous batching: many sequences through one network, a step at a time, over a paged key-value cache.

A choice of a request has these forms, in the order of its life:

- `Request` (`request.py`): one prompt, for all its choices. The service calls it `EngineRequest`.
- `Continuation` (`continuation.py`): one choice, with its sampler, text and grammar, from `Engine.add` to its end.
- `SequenceState` (`sequence.py`): its tokens and the blocks of their keys, as the scheduler sees them.
- `ScheduledSequence` (`step_plan.py`): the tokens that a step computes. Attention sees it as a `PlannedSequence`.
- `StepSequence` (`step_batch.py`): these tokens with their sampler, tracer and edits, and what the step computes.
- `Output` (`request.py`): the new tokens of a step, for the service, which collects them in a `Choice`.
"""
