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
