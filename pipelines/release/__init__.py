"""From decision to release: registry aliases and the ledger of who promoted what, and why."""
