-- The values that encryption covers, as they are stored (stores/sql/kept.py), and how they are written again.
-- Each query has a name, and is read as `statement(package, name)` (stores/sql/queries.py).

-- name: kept_keys
-- A page, in the order of the primary key. ?1, ?2 after this row · ?3 limit
SELECT scope, key, response_status, response_headers, response_body, response_schema_version, last_error, state,
       fingerprint_version, expires_at
FROM idempotency_keys
WHERE (scope, key) > (?1, ?2)
ORDER BY scope, key LIMIT ?3

-- name: kept_steps
-- ?1-?3 after this row · ?4 limit
SELECT scope, key, name, result
FROM idempotency_steps
WHERE (scope, key, name) > (?1, ?2, ?3)
ORDER BY scope, key, name LIMIT ?4

-- name: kept_audit
-- ?1 after this row · ?2 limit
SELECT id, scope, key, event, why FROM idempotency_audit WHERE id > ?1 ORDER BY id LIMIT ?2

-- name: kept_jobs
-- ?1 after this row · ?2 limit
SELECT id, scope, key, payload, last_error, history FROM idempotency_outbox WHERE id > ?1 ORDER BY id LIMIT ?2

-- name: rewrite_keys
-- Write new values over the old ones. 0 rows: they are not as they were, and nothing is written.
-- ?1, ?2 the row · ?3-?7 its old values · ?8-?11 the new ones
UPDATE idempotency_keys SET
    response_headers = ?8, response_body = ?9, response_schema_version = ?10, last_error = ?11
WHERE scope = ?1 AND key = ?2
  AND response_status IS ?3 AND response_headers IS ?4 AND response_body IS ?5 AND response_schema_version IS ?6
  AND last_error IS ?7

-- name: rewrite_steps
UPDATE idempotency_steps SET result = ?5 WHERE scope = ?1 AND key = ?2 AND name = ?3 AND result IS ?4

-- name: rewrite_audit
UPDATE idempotency_audit SET why = ?3 WHERE id = ?1 AND why IS ?2

-- name: rewrite_jobs
UPDATE idempotency_outbox SET payload = ?5, last_error = ?6, history = ?7
WHERE id = ?1 AND payload IS ?2 AND last_error IS ?3 AND history IS ?4
