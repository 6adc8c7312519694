"""MLflow runs, the report and its plots: what people look at."""
