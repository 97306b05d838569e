"""Looking at a run from outside, while it lasts or afterwards: journals, live beats, metrics, traces, a picture."""
