-- The rows of a batch of swaps that still are as their swap says, locked in key order (no deadlocks).
-- SKIP LOCKED: a row in another open transaction is busy, and the other rows of the batch do not wait for it.
-- LATERAL with OFFSET 0 leaves the planner only one plan, a look-up by primary key for each row. With the statistics of
-- an almost empty table it would read the whole index, and keep that plan when the table grows.
-- The result has all of `w` and the row's place (ctid), so that no second join is needed. In a partitioned table a
-- place is unique only within its partition (`part`). IS NOT DISTINCT FROM instead of =, because the planner would use
-- = as one more join, and read the whole index of an almost empty table again.
held AS (
    SELECT w.*, k.part, k.place
    FROM (SELECT * FROM wanted ORDER BY scope COLLATE "C", key COLLATE "C") AS w
    CROSS JOIN LATERAL (
        SELECT i.tableoid AS part, i.ctid AS place
        FROM idempotency_keys AS i
        WHERE
            i.scope = w.scope AND i.key = w.key AND i.state = w.from_state AND i.owner = w.owner
            AND (w.lease_over_by IS NULL OR i.lease_until + w.lease_over_by * interval '1 second' <= now())
            AND (NOT w.past_expiry OR i.expires_at <= now())
        OFFSET 0
        FOR {lock} SKIP LOCKED
    ) AS k
)
