"""Faults on purpose: the faults of docs/fault-model.md are injected, and what happens is judged.

``rows`` lists the rows. Each draws faults from a seed, injects one after the other, and yields an outcome for each.
``python -m faults --help`` runs them; ``make faults`` runs the counts that the page shows.
"""
