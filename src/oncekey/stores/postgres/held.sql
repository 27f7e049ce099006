-- The rows of a batch of swaps that still are as their swap says, locked in key order (no deadlocks).
-- All of `w` is carried along: joining `wanted` again would compare every row with every other.
-- SKIP LOCKED: a row inside somebody's open transaction is busy, and nobody else in the batch waits for it.
held AS (
    SELECT w.*
    FROM wanted AS w
    INNER JOIN idempotency_keys AS k ON k.scope = w.scope AND k.key = w.key
    WHERE
        k.state = w.from_state AND k.owner = w.owner
        AND (w.lease_over_by IS NULL OR k.lease_until + w.lease_over_by * interval '1 second' <= now())
        AND (NOT w.past_expiry OR k.expires_at <= now())
    ORDER BY k.scope, k.key
    FOR NO KEY UPDATE OF k SKIP LOCKED
)
