"""The experiments of RESULTS.md: small worlds, their models, and studies over training runs."""
