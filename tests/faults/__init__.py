"""Faults on purpose: every row of the table in docs/reliability.md is injected, and what happens is judged.

``rows`` lists the rows. Each draws faults from a seed, injects one after the other, and yields an outcome for each.
``python -m faults --help`` runs them; ``make faults`` runs the counts that the page shows.
"""
