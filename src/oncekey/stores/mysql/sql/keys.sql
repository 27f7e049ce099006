-- Taking, moving, reading and listing keys.
-- Each query has a name, and is read as `statement(package, name)` (stores/sql/queries.py). packets.py fills in `:name` and
-- `{name}`; several statements go to the server in one packet. A lane that is paused between two packets then holds no lock.

-- name: columns
-- The columns of a Record, in the order in which rows.py reads them; `k` is the row. Times are whole microseconds.
k.scope, k.`key`, k.operation, k.fingerprint, k.fingerprint_version, k.effects, k.state, k.attempt, k.owner,
timestampdiff(MICROSECOND, '1970-01-01', k.lease_until), k.recovery_point,
k.response_status, k.response_headers, k.response_body, k.response_schema_version,
k.last_error, timestampdiff(MICROSECOND, '1970-01-01', k.reconcile_at), k.reconcile_tries,
timestampdiff(MICROSECOND, '1970-01-01', k.created_at), timestampdiff(MICROSECOND, '1970-01-01', k.finished_at),
k.retention_seconds, timestampdiff(MICROSECOND, '1970-01-01', k.expires_at), timestampdiff(MICROSECOND, '1970-01-01', {now}),
k.fingerprint_recipe, k.quarantine_seconds

-- name: at_keys
-- The rows of a batch `w`, each found by its primary key.
STRAIGHT_JOIN idempotency_keys AS k FORCE INDEX (PRIMARY) ON k.scope = w.scope AND k.`key` = w.`key`

-- name: is_held
-- Whether the row of a batch is one of those that `hold` locked. Most often it locked them all.
(@oncekey_count = :size OR find_in_set(w.n, @oncekey_held))

-- name: is_moved
-- Whether the row of a batch is as this packet has made it: gone, or in this state under this owner.
NOT EXISTS (
    SELECT 1 FROM idempotency_keys AS o
    WHERE o.scope = w.scope AND o.`key` = w.`key` AND NOT (o.state <=> w.moved_to AND o.owner = w.moved_owner)
)

-- name: end
-- The owners end their attempts: each row becomes final, with its response. Every request waits for this packet, so it sets
-- only what such a move can change; `swap` does every other move. It moves all rows of the batch or none. The UPDATE returns how
-- many it moved and its time; the caller has the rest of each row.
{begin};
{end_rows};
{whole};
COMMIT

-- name: begin
-- A savepoint ends with its transaction. In a Galera cluster, a write of another node can end a transaction between two statements
-- of a packet, and the rest of the packet then runs without one: `whole` fails, and the packet is sent again. So every move
-- compares the row once more.
START TRANSACTION;
SAVEPOINT oncekey

-- name: whole
RELEASE SAVEPOINT oncekey

-- name: end_rows
-- If a row is not as its swap says, or is locked (SKIP LOCKED), the count is too small. The UPDATE then has an impossible WHERE and
-- reads no row, so it waits for none; `swap` moves the others. request_rows.py says what `place` and the values are.
SELECT count(*) INTO @oncekey_count
FROM idempotency_keys AS k FORCE INDEX (PRIMARY)
WHERE k.state = 'in_progress' AND ({owned})
FOR UPDATE SKIP LOCKED;
UPDATE idempotency_keys AS k FORCE INDEX (PRIMARY) SET
    k.response_status = {place},
    k.state = {new_state},
    k.response_headers = {new_headers},
    k.response_body = {new_body},
    k.response_schema_version = {new_schema_version},
    k.last_error = {new_last_error},
    k.reconcile_at = NULL,
    k.finished_at = utc_timestamp(6),
    k.expires_at = greatest(k.expires_at, utc_timestamp(6) + INTERVAL {new_retention} MICROSECOND),
    k.response_status = {new_status}
WHERE @oncekey_count = :size AND {returns_time} AND k.state = 'in_progress' AND ({owned})

-- name: returns_time
-- Always true. The result of a statement that writes has a place for one number, and this puts the statement's time there:
-- connection.py reads it as `Written.time`. A SELECT for it would be one more statement.
last_insert_id(timestampdiff(MICROSECOND, '1970-01-01', utc_timestamp(6))) > 0

-- name: retention
-- The retention of a row as microseconds.
CAST(round(k.retention_seconds * 1000000) AS SIGNED)

-- name: hold
-- Lock the rows of a batch of swaps that still are as their swap says, in key order, and remember their numbers and the
-- time. SKIP LOCKED: a row in another open transaction is busy, and the other rows of the batch do not wait for it. In a
-- Galera cluster the lock is the node's own; if two nodes move a row, the COMMIT of one fails with 1213 (which is why it is a packet of its own: connection.py).
{begin};
SELECT group_concat(w.n), count(*), utc_timestamp(6) INTO @oncekey_held, @oncekey_count, @oncekey_now
FROM ({compared}) AS w {at_keys}
WHERE
    k.state = w.from_state AND k.owner = w.owner
    AND (w.lease_over_by IS NULL OR k.lease_until + INTERVAL w.lease_over_by MICROSECOND <= utc_timestamp(6))
    AND (NOT w.past_expiry OR k.expires_at <= utc_timestamp(6))
    AND (w.from_effects IS NULL OR k.effects = w.from_effects)
    -- A key in progress is deleted only in its first attempt, and without steps.
    AND (w.moves OR k.state <> 'in_progress' OR (k.attempt = 1 AND k.recovery_point IS NULL))
FOR UPDATE SKIP LOCKED

-- name: swap
-- Move each row that is held; a row that is not returned was not moved.
{hold};
UPDATE ({wanted}) AS w {at_keys} SET
    k.state = w.to_state,
    k.owner = coalesce(w.new_owner, k.owner),
    k.attempt = coalesce(w.attempt, k.attempt),
    k.effects = coalesce(w.effects, k.effects),
    k.lease_until = coalesce({now} + INTERVAL w.lease_seconds MICROSECOND, k.lease_until),
    k.recovery_point = coalesce(w.recovery_point, k.recovery_point),
    k.response_status = w.status,
    k.response_headers = w.headers,
    k.response_body = w.body,
    k.response_schema_version = w.schema_version,
    k.last_error = w.last_error,
    k.reconcile_at = {now} + INTERVAL w.reconcile_in MICROSECOND,
    k.reconcile_tries = coalesce(w.reconcile_tries, k.reconcile_tries),
    k.finished_at = CASE WHEN w.to_state IN ('completed', 'failed') THEN {now} END,
    k.expires_at = CASE
        WHEN w.to_state IN ('completed', 'failed') OR w.settles
            THEN greatest(k.expires_at, {now} + INTERVAL {retention} MICROSECOND)
        ELSE k.expires_at
    END
WHERE {is_held} AND k.state = w.was_state AND k.owner = w.was_owner;
{beside}
SELECT w.n, {columns} FROM ({placed}) AS w {at_keys} WHERE {is_held};
{whole};
COMMIT

-- name: remove
-- Delete each row that is held, with its steps, and return it as it was.
{hold};
SELECT w.n, {columns} FROM ({placed}) AS w {at_keys} WHERE {is_held};
DELETE k FROM ({compared}) AS w {at_keys} WHERE {is_held} AND k.state = w.from_state AND k.owner = w.owner;
{beside}
{whole};
COMMIT

-- name: restart
-- A key starts over after its expiry: attempt 1, a new request, nothing of the old request or its steps.
{hold};
UPDATE ({wanted}) AS w {at_keys} SET
    k.operation = w.operation,
    k.fingerprint = w.fingerprint,
    k.fingerprint_version = w.fingerprint_version,
    k.fingerprint_recipe = w.fingerprint_recipe,
    k.quarantine_seconds = w.quarantine_seconds,
    k.effects = w.effects,
    k.state = 'in_progress',
    k.attempt = 1,
    k.owner = w.owner,
    k.lease_until = {now} + INTERVAL w.lease MICROSECOND,
    k.recovery_point = NULL,
    k.response_status = NULL,
    k.response_headers = NULL,
    k.response_body = NULL,
    k.response_schema_version = NULL,
    k.last_error = NULL,
    k.reconcile_at = NULL,
    k.reconcile_tries = 0,
    k.created_at = {now},
    k.finished_at = NULL,
    k.retention_seconds = w.retention_seconds,
    k.expires_at = {now} + INTERVAL w.retention MICROSECOND
WHERE {is_held} AND k.state = w.was_state AND k.owner = w.was_owner;
{beside}
SELECT w.n, {columns} FROM ({placed}) AS w {at_keys} WHERE {is_held};
{whole};
COMMIT

-- name: now
-- The time of the transaction: the server's, when it locked its rows.
CAST(@oncekey_now AS DATETIME(6))

-- name: read
SELECT {columns} FROM idempotency_keys AS k FORCE INDEX (PRIMARY) WHERE {among}

-- name: reserve
-- Insert what is absent, then read all, if something was there. Each statement is a commit of its own. If all rows were inserted,
-- they are as the caller wrote them at the time that the INSERT returns, and an impossible WHERE saves the read.
-- The anti-join reads without locks (READ COMMITTED), so a row that another open transaction has locked or updated is seen as
-- it was committed before, and not waited for. If a rival inserts a row at this moment, the INSERT waits for its commit and
-- fails as a whole (1062); if a row is deleted between the two, it is not read. In both cases the caller asks again.
{reserve_rows}

-- name: reserve_rows
INSERT INTO idempotency_keys (
    scope, `key`, operation, fingerprint, fingerprint_version, effects, state, attempt, owner,
    lease_until, created_at, retention_seconds, expires_at, fingerprint_recipe, quarantine_seconds
)
SELECT
    w.scope, w.`key`, {want_operation}, {want_fingerprint}, {want_fingerprint_version}, {want_effects}, 'in_progress', 1,
    {want_owner}, utc_timestamp(6) + INTERVAL {want_lease} MICROSECOND, utc_timestamp(6), {want_retention_seconds},
    utc_timestamp(6) + INTERVAL {want_retention} MICROSECOND, {want_fingerprint_recipe}, {want_quarantine_seconds}
FROM ({wanted}) AS w
LEFT JOIN idempotency_keys AS i ON i.scope = w.scope AND i.`key` = w.`key`
WHERE i.scope IS NULL AND {returns_time};
SET @oncekey_count = row_count();
SELECT {columns} FROM idempotency_keys AS k FORCE INDEX (PRIMARY) WHERE @oncekey_count < :enough AND ({among})

-- name: listing
-- The rows that an operator asks for, in the order of their keys. The index is part of the text: a state with few rows has
-- one of its own, and all other filters read in the order of the keys.
SELECT {columns} FROM idempotency_keys AS k FORCE INDEX ({index})
WHERE
    {state}
    AND (:scope IS NULL OR k.scope = :scope)
    AND k.scope >= :after_scope AND (k.scope > :after_scope OR k.`key` > :after_key)
    AND (:operation IS NULL OR k.operation = :operation)
    AND (:older_than IS NULL OR k.created_at <= utc_timestamp(6) - INTERVAL :older_than MICROSECOND)
ORDER BY k.scope, k.`key`
LIMIT :limit

-- name: tally
-- How many keys a tenant has, for limits; no more than the limit are read. Scopes are compared as bytes.
SELECT count(*) FROM (
    SELECT 1 FROM idempotency_keys AS k FORCE INDEX (PRIMARY)
    WHERE
        k.scope >= :tenant AND k.scope < :end
        AND (:newer_than IS NULL OR k.created_at > utc_timestamp(6) - INTERVAL :newer_than MICROSECOND)
    LIMIT :limit
) AS counted

-- name: both
-- As `end`, and then as `reserve`, in one commit.
{begin};
{end_rows};
{reserve_rows};
{whole};
COMMIT
