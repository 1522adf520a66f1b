"""The supervisor: one small process per attempt, between the API and the trainer.

It imports no torch, lives in a session of its own, and outlives the Celery worker that started it.
"""
