-- A move to "no row": discard, expire, forget. The same comparison as swap.sql, and one more: a key in progress is
-- deleted only in its first attempt, and without steps.
-- ?1-?4 key, state, owner · ?5 the lease ended this long ago · ?6 past expiry · ?7 now
DELETE FROM idempotency_keys
WHERE scope = ?1 AND key = ?2 AND state = ?3 AND owner = ?4
  AND (?5 IS NULL OR lease_until + ?5 <= ?7)
  AND (NOT ?6 OR expires_at <= ?7)
  AND (state <> 'in_progress' OR (attempt = 1 AND recovery_point IS NULL))
