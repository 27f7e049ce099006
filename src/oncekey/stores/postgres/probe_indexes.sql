-- The indexes of oncekey's tables, and whether each is valid: a failed CREATE INDEX CONCURRENTLY leaves an invalid one.
SELECT i.relname, x.indisvalid AND x.indisready
FROM pg_index AS x
INNER JOIN pg_class AS i ON x.indexrelid = i.oid
WHERE x.indrelid IN (
    to_regclass('idempotency_keys'), to_regclass('idempotency_steps'), to_regclass('idempotency_outbox'),
    to_regclass('idempotency_audit')
)
