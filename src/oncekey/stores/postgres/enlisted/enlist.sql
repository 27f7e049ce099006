-- The first statement of an enlisted transaction: lock the key's row, and set a mark that ends with the transaction.
-- From here on the lock does the work of the lease. Under REPEATABLE READ and SERIALIZABLE it also prevents a renewal
-- after the snapshot, which would let the last statement fail.
-- 0 rows: another attempt owns the key, this is another database, or the snapshot is older than the reservation.
-- It returns the transaction's number, so that oncekey can ask the server later whether it was committed (fate.sql).
-- The commit must be on disk before the response is sent, as with oncekey's own connections: with
-- synchronous_commit = off a crash would lose an answered request. Every stronger setting stays as it is.
WITH mine AS (
    SELECT k.owner FROM idempotency_keys AS k
    WHERE
        k.scope = CAST(:scope AS text) AND k.key = CAST(:key AS text) AND k.owner = CAST(:owner AS text)
        AND k.state = 'in_progress'
    FOR NO KEY UPDATE
)

SELECT
    txid_current(),
    set_config('oncekey.owner', mine.owner, true),
    set_config(
        'synchronous_commit',
        CASE current_setting('synchronous_commit') WHEN 'off' THEN 'on' ELSE current_setting('synchronous_commit') END,
        true
    )
FROM mine
