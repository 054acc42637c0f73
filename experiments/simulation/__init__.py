"""The real scheduler and prefix cache under a trace of requests, with a time model in the model's place.

traces     requests from files and from a generator, one at a time
shapes     the models, by name: weights, FLOPs and bytes of keys and values
hardware   the GPUs, by name
step_time  how long a step takes: a roofline
replay     the loop: arrivals, schedule, the clock, commit
metrics    what is counted on the way
arms       what is compared, and one arm's run

Nothing that `replay` imports loads torch.
"""
