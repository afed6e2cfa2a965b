"""Pages about runs and plans: one HTML file each, which needs no network. Imports no torch.

    run_data     reads the files of a run, and thins what is too much for a page
    findings     what a reader should know first: sentences about rewards, waits and predictions
    compare      where two runs part: settings, and the first differing step, call, sample and token
    figures      curves, timelines, memory and meshes as figures of plotly
    samples      the rollouts that a page shows
    page         the parts of a page, and its HTML
    run_page     the page of one run or of several
    plan_page    the page of a plan
    trace        the events of a run as a trace for Perfetto
"""
