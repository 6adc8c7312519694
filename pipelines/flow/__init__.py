"""The content-addressed flow of stages. It knows nothing about models."""
