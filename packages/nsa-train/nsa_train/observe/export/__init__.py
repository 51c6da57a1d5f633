"""Export of metrics: Prometheus exporter and alert rules, background logging to W&B and MLflow."""
