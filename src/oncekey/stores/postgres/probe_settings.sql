-- The settings that decide whether a commit survives a crash. reset_val is the setting of the server, the database and
-- the role; oncekey's own connections switch synchronous_commit on.
SELECT name, reset_val FROM pg_settings
WHERE name IN ('synchronous_commit', 'fsync', 'full_page_writes')
UNION ALL
SELECT 'standby', pg_is_in_recovery()::text
