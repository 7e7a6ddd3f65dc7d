"""The data of reductions: gradient leaves, arrays on the host, and buckets of leaves that are reduced together.

Uses nothing else of data_parallel. The rest of data_parallel uses it.
"""
