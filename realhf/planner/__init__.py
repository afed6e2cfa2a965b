"""The planner: what a plan costs in seconds and bytes, and the search for the best one.

The map of its modules, in reading order: a module imports only those before it, which a test holds.

The work of each call:
    lengths               lengths of responses as distributions, and the rows of a round of generation
    slowest_replica       decode steps of the replica that ends last
    turns                 turns of rollouts, and the waits for their environments
    slices                seconds of calls in plain Python whose environments take turns
    problem               the planning problem: calls with their workloads, roles, cluster
    micro_batches         how calls on sequences are split
    shard                 the part of a model that a rank holds, and the bytes of its states
    rows                  rows that decode at once, and the cache that they need

Seconds of each call:
    efficiencies          the shares of their peaks that devices reach, and what engines launch
    links                 groups of ranks on hosts, and seconds of messages and collectives
    measured_links        links of a cluster as nccl-tests measured them
    rates                 seconds of a block, a head or a collective on a device, by its roofline
    shared_cores          how much longer calls take on cores that processes share
    call_cost             seconds of a call on a mesh

Bytes of each rank:
    deadline              the moment at which work on a plan ends
    call_memory           bytes that one call needs on a rank
    communicator_memory   bytes of the communicators of all layouts
    memory_account        the only place that adds up a rank's memory, and checks it

Seconds of a step:
    reallocation          seconds of a reallocation, estimated
    step_time             seconds of a step in the steady state

Measured seconds:
    profile               the profile of a machine: its file and tables
    profiled_rates        rates that look times up in a profile

The search:
    candidates            the layouts and options of one call, with cost and memory
    call_group            calls that must share a layout, with their candidates as arrays
    memory_bounds         memory of many plans at once
    search_space          times and memory of many plans at once
    search                local search, and branch and bound with a proven lower bound
    reserves              among plans that are nearly as fast, one with reserves of memory

The answer:
    reasons               why a call has its layout, and what would change that
    make                  makes a plan or prices one: search, simulation, reasons
    report                shows a plan
    ranges                a plan that stays good if the planner's figures are off
    comparisons           a plan beside others
"""
