"""What a run tells other people's systems: Prometheus with its alerts, Weights & Biases, MLflow."""
