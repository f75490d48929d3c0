"""Logical cache policy: what is catalogued, what a request may start from, what is captured and kept (D-2).

How the parts fit
-----------------

    resource_manager      the one holder of a `CacheState`; claims, adoption, reports
    records               that state and the records in it, all immutable
    ports                 what the manager needs from the program, opaque handles only

    request_facts         one request as planning sees it
    catalog, sessions     cells and their entries; session bindings by publication order
    shortlist, sources    which checkpoints match exactly; Retain or Consume (N-9)
    captures              frontiers, kinds and anchor replacement of the private-only policy
    portfolio_facts       priors, keys, hits, recency and demand as rows of a planning round
    lost                  what went not long ago, and the reasons of misses

    admission_planning    one admission: sources, round, search
    capture_planning,
    shared_capture        one capture: the baseline, then a shared prefix that gains strictly
    adoption,
    capture_adoption,
    settlement, losses    absolute results, checked and then taken over whole
    explain               an admission as a `PlanOutcome`
"""
