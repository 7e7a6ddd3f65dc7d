"""What is reduced: gradient leaves, arrays on the host, and buckets of leaves that are reduced together.

Uses nothing else of data_parallel. Everything else in it uses this.
"""
