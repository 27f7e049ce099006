-- The rows of a batch of swaps that still are as their swap says, locked in key order (no deadlocks).
-- SKIP LOCKED: a row inside somebody's open transaction is busy, and nobody else in the batch waits for it.
-- LATERAL with OFFSET 0 leaves the planner one way only, a look-up by primary key for each row: with statistics of an
-- almost empty table it would read the whole index instead, and the cached plan would stay when the table grows.
-- All of `w` and the row's place are carried along, so that nothing is joined a second time. A place is one of its
-- partition (`part`), where the table has several: in the others it is somebody else's row. IS NOT DISTINCT FROM, since
-- the planner would take = as one more way to join, and read all of an almost empty table's index again.
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
