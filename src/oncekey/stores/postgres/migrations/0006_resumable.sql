-- Works with: schema 0002 (oncekey 0.1.0) and later.
--
-- Half-done requests that upkeep goes on with, by when it may. An older version that leaves one writes no such time: that
-- one waits for its client, as before. Making the index reads the whole table, and writes wait for it: on a large
-- one, make it before `oncekey migrate`, with CREATE INDEX CONCURRENTLY.
CREATE INDEX IF NOT EXISTS idempotency_keys_resumable ON idempotency_keys (reconcile_at)
WHERE state = 'failed_retryable' AND reconcile_at IS NOT NULL;
