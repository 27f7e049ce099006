-- Delete final rows past their expiry, and expired rows that were kept for a second retention, with their steps, up to
-- a common limit. Rows in an open transaction are skipped. Place and part: see held.sql.
WITH keys_past AS (
    SELECT k.tableoid AS part, k.ctid AS place FROM idempotency_keys AS k
    WHERE
        (k.state IN ('completed', 'failed') OR (k.state = 'failed_retryable' AND k.recovery_point IS NULL))
        AND k.expires_at <= now()
    ORDER BY k.expires_at
    LIMIT CASE WHEN %(tombstones_only)s THEN 0 ELSE %(limit)s END
    FOR UPDATE SKIP LOCKED
),

tombstones AS (
    SELECT k.tableoid AS part, k.ctid AS place FROM idempotency_keys AS k
    WHERE
        k.state = 'expired'
        AND (k.expires_at AT TIME ZONE 'UTC') + k.retention_seconds * interval '1 second' <= now() AT TIME ZONE 'UTC'
    ORDER BY (k.expires_at AT TIME ZONE 'UTC') + k.retention_seconds * interval '1 second'
    LIMIT %(limit)s - (SELECT count(*) FROM keys_past)
    FOR UPDATE SKIP LOCKED
),

moved AS (
    DELETE FROM idempotency_keys AS k
    USING (SELECT * FROM keys_past UNION ALL SELECT * FROM tombstones) AS d
    WHERE k.ctid = d.place AND k.tableoid IS NOT DISTINCT FROM d.part
    RETURNING k.scope, k.key, true AS forgets
),

{forgotten}

SELECT count(*) FROM moved
