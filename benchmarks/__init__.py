"""The measured claims. ``python -m benchmarks`` runs all of them, side by side in one run; ``--help`` lists them."""
