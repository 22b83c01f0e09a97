-- A machine token's user and a new session epoch (rule 14), in one statement. No row: the value is not valid.
with t as (
  select t.token_id, t.user_id
  from machine_token_values v join machine_tokens t using (token_id)
  where v.hash = %(hash)s and t.revoked_at is null
    and (v.expires_at is null or v.expires_at > now()) and (t.expires_at is null or t.expires_at > now())
), used as (
  update machine_token_values v set used_at = now() from t
  where v.hash = %(hash)s and v.expires_at is not null and v.used_at is null
)
insert into session_epochs as e (user_id, epoch)
select user_id, floor(extract(epoch from clock_timestamp()) * 1000)::bigint from t
on conflict (user_id) do update set epoch = greatest(e.epoch + 1, excluded.epoch)
returning e.user_id, e.epoch, (select token_id::text from t) as token_id
