"""The training loop of a run: model, data, steps, metrics, anomalies, the page."""
