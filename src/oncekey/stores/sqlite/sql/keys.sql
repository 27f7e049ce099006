-- Taking, moving, reading and listing keys.
-- Each query has a name, and is read as `statement(package, name)` (stores/sql/queries.py).

-- name: batch
-- A batch as one statement: INSERT INTO oncekey_batch, with swaps and reservations as JSON lists of lists, their bytes
-- in one piece, and the time. The view is temporary: each connection creates its own, and the file does not contain it.
CREATE TEMP VIEW oncekey_batch AS
SELECT NULL AS ends, NULL AS begins, NULL AS bytes, NULL AS now;

-- Swaps come first, so that a reservation of the same key finds the response. They compare and set what swap.sql does
-- for an owner's last move; reservations do what insert.sql does. Rows that do not match stay as they are, and the
-- caller sees that from the number of changes.
CREATE TEMP TRIGGER oncekey_apply INSTEAD OF INSERT ON oncekey_batch
BEGIN
    UPDATE idempotency_keys SET
        state = json_extract(w.value, '$[3]'),
        last_error = json_extract(w.value, '$[4]'),
        reconcile_at = NULL,
        finished_at = NEW.now,
        expires_at = max(expires_at, NEW.now + retention_seconds),
        response_status = json_extract(w.value, '$[5]'),
        response_headers = json_extract(w.value, '$[6]'),
        response_schema_version = json_extract(w.value, '$[7]'),
        response_body = substr(NEW.bytes, json_extract(w.value, '$[8]'), json_extract(w.value, '$[9]'))
    FROM json_each(NEW.ends) AS w
    WHERE idempotency_keys.scope = json_extract(w.value, '$[0]')
      AND idempotency_keys.key = json_extract(w.value, '$[1]')
      AND idempotency_keys.owner = json_extract(w.value, '$[2]')
      AND idempotency_keys.state = 'in_progress';

    INSERT INTO idempotency_keys (
        scope, key, owner, operation, fingerprint_version, effects, fingerprint, state, attempt, lease_until,
        reconcile_tries, created_at, retention_seconds, expires_at, fingerprint_recipe,
        quarantine_seconds
    )
    SELECT
        json_extract(w.value, '$[0]'),
        json_extract(w.value, '$[1]'),
        json_extract(w.value, '$[2]'),
        json_extract(w.value, '$[3]'),
        json_extract(w.value, '$[4]'),
        json_extract(w.value, '$[5]'),
        substr(NEW.bytes, json_extract(w.value, '$[6]'), json_extract(w.value, '$[7]')),
        'in_progress',
        1,
        NEW.now + json_extract(w.value, '$[8]'),
        0,
        NEW.now,
        json_extract(w.value, '$[9]'),
        NEW.now + json_extract(w.value, '$[9]'),
        json_extract(w.value, '$[10]'),
        json_extract(w.value, '$[11]')
    FROM json_each(NEW.begins) AS w
    WHERE true
    ON CONFLICT (scope, key) DO NOTHING;
END;

-- name: batch_apply
-- One batch; the trigger in batch.sql does the work.
INSERT INTO temp.oncekey_batch (ends, begins, bytes, now) VALUES (?, ?, ?, ?)

-- name: delete
-- A move to "no row": discard, expire, forget. The same comparison as swap.sql, and one more: a key in progress is
-- deleted only in its first attempt, and without steps.
-- ?1-?4 key, state, owner · ?5 the lease ended this long ago · ?6 past expiry · ?7 now
DELETE FROM idempotency_keys
WHERE scope = ?1 AND key = ?2 AND state = ?3 AND owner = ?4
  AND (?5 IS NULL OR lease_until + ?5 <= ?7)
  AND (NOT ?6 OR expires_at <= ?7)
  AND (state <> 'in_progress' OR (attempt = 1 AND recovery_point IS NULL))

-- name: insert
-- Insert a reservation if there is no row. 0 rows: another process was faster, and the caller must read its row.
INSERT INTO idempotency_keys (
    scope, key, operation, fingerprint, fingerprint_version, effects, state, attempt, owner, lease_until,
    reconcile_tries, created_at, retention_seconds, expires_at, fingerprint_recipe,
    quarantine_seconds
) VALUES (?1, ?2, ?3, ?4, ?5, ?6, 'in_progress', 1, ?7, ?8, 0, ?9, ?10, ?11, ?12, ?13)
ON CONFLICT (scope, key) DO NOTHING

-- name: listing
-- The rows that an operator asks for, in the order of their keys. The state and its index are part of the text: a
-- partial index with few rows is always better here than reading all keys, and SQLite does not know that.
-- ?1, ?2 after this (scope, key) · ?3 scope · ?4 operation · ?5 created by then · ?6 limit
SELECT scope, key, operation, fingerprint, fingerprint_version, effects, state, attempt, owner, lease_until,
       recovery_point, last_error, reconcile_at, reconcile_tries, created_at, finished_at, retention_seconds,
       expires_at, fingerprint_recipe, quarantine_seconds
FROM idempotency_keys {index}
WHERE {state} AND {scope}
  AND (scope, key) > (?1, ?2)
  AND (?4 IS NULL OR operation = ?4)
  AND (?5 IS NULL OR created_at <= ?5)
ORDER BY scope, key LIMIT ?6

-- name: tally
-- How many keys a tenant has, for limits; no more than the limit are read. Scopes are compared as bytes.
-- ?1 tenant · ?2 the end of its scopes · ?3 created after then · ?4 limit
SELECT count(*) FROM (
    SELECT 1 FROM idempotency_keys
    WHERE scope >= ?1 AND scope < ?2 AND (?3 IS NULL OR created_at > ?3)
    LIMIT ?4
)

-- name: moved
-- The row that swap.sql just moved, without the response: the swap has it.
SELECT scope, key, operation, fingerprint, fingerprint_version, effects, state, attempt, owner, lease_until,
       recovery_point, last_error, reconcile_at, reconcile_tries, created_at, finished_at, retention_seconds,
       expires_at, fingerprint_recipe, quarantine_seconds
FROM idempotency_keys
WHERE scope = ? AND key = ?

-- name: moved_many
-- Of rows that swap.sql just moved, the columns that the caller cannot know: the owner may have renewed or advanced.
SELECT k.scope, k.key, k.lease_until, k.recovery_point
FROM json_each(?1) AS w
CROSS JOIN idempotency_keys AS k
WHERE k.scope = json_extract(w.value, '$[0]') AND k.key = json_extract(w.value, '$[1]')

-- name: read
-- One row by its key. The response comes last: rows.py reads the columns by position.
SELECT scope, key, operation, fingerprint, fingerprint_version, effects, state, attempt, owner, lease_until,
       recovery_point, last_error, reconcile_at, reconcile_tries, created_at, finished_at, retention_seconds,
       expires_at, fingerprint_recipe, quarantine_seconds,
       response_status, response_headers, response_schema_version, response_body
FROM idempotency_keys
WHERE scope = ? AND key = ?

-- name: read_many
-- The rows of many keys at once: ?1 is a JSON list of [scope, key]. One statement releases the GIL once, not per row.
-- CROSS JOIN fixes the order: for each wanted key, one look-up in the primary key.
SELECT k.scope, k.key, k.operation, k.fingerprint, k.fingerprint_version, k.effects, k.state, k.attempt, k.owner,
       k.lease_until, k.recovery_point, k.last_error, k.reconcile_at, k.reconcile_tries, k.created_at, k.finished_at,
       k.retention_seconds, k.expires_at, k.fingerprint_recipe, k.quarantine_seconds,
       k.response_status, k.response_headers, k.response_schema_version, k.response_body
FROM json_each(?1) AS w
CROSS JOIN idempotency_keys AS k
WHERE k.scope = json_extract(w.value, '$[0]') AND k.key = json_extract(w.value, '$[1]')

-- name: restart
-- A key starts over after its expiry: the same comparison as swap.sql, and then the row is as insert.sql makes it.
-- ?1-?4 key, state, owner · ?5 the lease ended this long ago · ?6 past expiry · ?7 now · ?8-?17 the new reservation
UPDATE idempotency_keys SET
    operation = ?8,
    fingerprint = ?9,
    fingerprint_version = ?10,
    fingerprint_recipe = ?16,
    quarantine_seconds = ?17,
    effects = ?11,
    state = 'in_progress',
    attempt = 1,
    owner = ?12,
    lease_until = ?13,
    recovery_point = NULL,
    last_error = NULL,
    reconcile_at = NULL,
    reconcile_tries = 0,
    created_at = ?7,
    finished_at = NULL,
    retention_seconds = ?14,
    expires_at = ?15,
    response_status = NULL,
    response_headers = NULL,
    response_schema_version = NULL,
    response_body = NULL
WHERE scope = ?1 AND key = ?2 AND state = ?3 AND owner = ?4
  AND (?5 IS NULL OR lease_until + ?5 <= ?7)
  AND (NOT ?6 OR expires_at <= ?7)

-- name: swap
-- Every move that neither deletes nor starts over: compare (state, owner, lease, expiry) and set, in one statement.
-- 0 rows: the row is not as the swap says, and nothing was written (promise I3).
-- ?1-?4 key, state, owner · ?5 the lease ended this long ago · ?6 past expiry · ?7 now · ?8-?21 what it becomes · ?22 its effects
UPDATE idempotency_keys SET
    state = ?8,
    owner = coalesce(?9, owner),
    attempt = coalesce(?10, attempt),
    effects = coalesce(?20, effects),
    lease_until = coalesce(?7 + ?11, lease_until),
    recovery_point = coalesce(?12, recovery_point),
    last_error = ?13,
    reconcile_at = ?7 + ?14,
    reconcile_tries = coalesce(?21, reconcile_tries),
    finished_at = CASE WHEN ?15 THEN ?7 END,
    expires_at = CASE
        WHEN ?15 OR (?3 = 'unknown' AND ?8 = 'failed_retryable') THEN max(expires_at, ?7 + retention_seconds)
        ELSE expires_at
    END,
    response_status = ?16,
    response_headers = ?17,
    response_schema_version = ?18,
    response_body = ?19
WHERE scope = ?1 AND key = ?2 AND state = ?3 AND owner = ?4
  AND (?5 IS NULL OR lease_until + ?5 <= ?7)
  AND (NOT ?6 OR expires_at <= ?7)
  AND (?22 IS NULL OR effects = ?22)
