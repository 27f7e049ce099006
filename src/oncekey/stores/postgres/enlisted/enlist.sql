-- The first statement of an enlisted transaction: take the key's row, and leave a mark that ends with the transaction.
-- The lock acts as the lease from here on. It also makes the row ours in the snapshots of REPEATABLE READ and SERIALIZABLE,
-- where a renewal after the snapshot would let the last statement fail.
-- 0 rows: the key went to somebody else, this is another database, or the snapshot is older than the reservation.
-- The transaction's number comes back, so that the server can be asked later what became of it.
-- Its commit is on the disk before the response is sent, as with oncekey's own connections: a server, database or role
-- with synchronous_commit = off would lose an answered request in a crash. Every stronger setting stays as it is.
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
