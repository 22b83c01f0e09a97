// What the door says of a machine that is not there (`bridge:born`, rule 12a's times). Time is discrete, a tick is 5 s:
// a heartbeat every 2 ticks, presence lives 6, and for two heartbeats (4 ticks) after something was lost the door says
// `unknown`. One user's session and other workers; Redis is flushed, restarted with a snapshot of any age or with
// everything, or failed over to a replica that is up to a tick behind.
#include "checker.hpp"

constexpr uint8_t HEARTBEAT = 2, PRESENCE_TTL = 6, OLD = 4;

struct Offline {
  struct Redis {
    uint8_t presence;  // ticks left; 0: none
    uint8_t born;      // the key is there
    uint8_t born_age;  // up to OLD
    uint8_t born_ttl;
  };
  struct State {
    Redis redis, snapshot;
    uint8_t snapshot_age, has_snapshot;
    uint8_t up, connected;
    uint8_t since_heartbeat, must_assert;
    uint8_t link_age;    // since the gateway's connection to Redis last broke, up to OLD
    uint8_t minted_age;  // of the newest session, up to OLD
    uint8_t faults;
  };

  // When the door may say `offline`, besides that presence is gone and `born` is old:
  struct Options {
    bool link_age = false;    // the connection over which it asks is old, too (what we do)
    bool minted_age = false;  // the newest session was minted long ago
    bool born_has_ttl = false;
    bool reassert_on_reconnect = false;
    bool restart = false, fail_over = false;
    int faults = 2;
  } o;

  State first() const {
    State s{};
    s.up = 1;
    s.faults = o.faults;
    s.minted_age = s.link_age = OLD;
    return s;
  }

  void canonical(State&) const {}

  void give_birth(Redis& redis) const {
    if (!redis.born) {
      redis.born = 1;
      redis.born_age = 0;
    }
    if (o.born_has_ttl) redis.born_ttl = OLD;
  }

  void tick(Redis& redis) const {
    if (redis.presence) redis.presence--;
    if (redis.born && redis.born_age < OLD) redis.born_age++;
    if (!o.born_has_ttl || !redis.born) return;
    if (redis.born_ttl) redis.born_ttl--;
    if (!redis.born_ttl) redis.born = redis.born_age = 0;
  }

  bool says_offline(const State& s) const {
    if (!s.up || s.redis.presence) return false;
    if (!s.redis.born || s.redis.born_age < OLD) return false;
    if (o.minted_age && s.minted_age < OLD) return false;
    return !o.link_age || s.link_age >= OLD;
  }

  void next(const State& s, Steps<State>& out) const {
    const bool heartbeat_due = s.up && s.connected && (s.since_heartbeat >= HEARTBEAT || s.must_assert);
    if (!heartbeat_due)
      out.step(PROMPT, "5 s pass", [&](State& n) {
        tick(n.redis);
        if (s.has_snapshot) {
          tick(n.snapshot);
          if (n.snapshot_age < 9) n.snapshot_age++;
        }
        if (s.connected && n.since_heartbeat < 9) n.since_heartbeat++;
        if (n.minted_age < OLD) n.minted_age++;
        if (n.link_age < OLD) n.link_age++;
      });
    if (s.up) work(s, out);
    if (s.up && s.faults) lose(s, out);
    if (!s.up) come_back(s, out);
  }

  void heartbeat(State& n) const {
    n.since_heartbeat = n.must_assert = 0;
    give_birth(n.redis);
    n.redis.presence = PRESENCE_TTL;
  }

  void work(const State& s, Steps<State>& out) const {
    if (!s.connected)
      out.step(PROMPT, "machine connects, asserts", [&](State& n) {
        n.connected = 1;
        n.minted_age = 0;
        heartbeat(n);
      });
    if (s.connected) {
      out.step(PROMPT, "heartbeat", [&](State& n) { heartbeat(n); });
      out.step(PROMPT, "goodbye", [](State& n) {
        n.connected = 0;
        n.redis.presence = 0;
        n.since_heartbeat = n.must_assert = 0;
      });
    }
    out.step(PROMPT, "heartbeat of another worker", [&](State& n) { give_birth(n.redis); });
    out.step(PROMPT, "the door asks", [&](State& n) {
      if (!o.born_has_ttl) give_birth(n.redis);
    });
    out.step(PROMPT, "snapshot", [&](State& n) {
      n.snapshot = s.redis;
      n.has_snapshot = 1;
      n.snapshot_age = 0;
    });
  }

  void lose(const State& s, Steps<State>& out) const {
    const uint8_t asserts = o.reassert_on_reconnect ? s.connected : s.must_assert;
    out.step(FAULT, "Redis FLUSHED", [&](State& n) {
      n.redis = {};
      n.faults--;
      n.must_assert = asserts;
    });
    if (o.fail_over && s.has_snapshot && s.snapshot_age <= 1)
      out.step(FAULT, "FAIL-OVER to a replica up to 5 s behind", [&](State& n) {
        n.redis = s.snapshot;
        n.faults--;
        n.link_age = 0;
        n.must_assert = asserts;
      });
    if (o.restart)
      out.step(FAULT, "Redis DOWN", [](State& n) {
        n.up = 0;
        n.faults--;
        n.link_age = 0;
      });
  }

  void come_back(const State& s, Steps<State>& out) const {
    auto back = [&](const char* label, const Redis& with) {
      out.step(PROMPT, label, [&](State& n) {
        n.up = 1;
        n.link_age = 0;
        n.redis = with;
        if (o.reassert_on_reconnect) n.must_assert = s.connected;
      });
    };
    back("Redis back, empty", Redis{});
    if (s.has_snapshot) back("Redis back from its snapshot", s.snapshot);
    back("Redis back, nothing lost", s.redis);
  }

  static constexpr const char* NEVER = "never offline about a connected machine";

  Claims<State> claims() const {
    return {
        {{NEVER, [this](const State& s) { return !s.connected || !says_offline(s); }}},
        [this](const State& s) { return !s.connected && says_offline(s); },
        false,
    };
  }
};

using O = Offline::Options;
constexpr auto NEVER = Offline::NEVER;

const std::vector<Variant<Offline>> VARIANTS = {
    {"link-age", holds(103876),
     [](O& o) {
       o.link_age = o.restart = o.fail_over = true;
       o.faults = 3;
     }},
    {"born-alone-flush", holds(10438), [](O&) {}},
    {"reassert-and-minted-fail-over", holds(21045),
     [](O& o) { o.fail_over = o.reassert_on_reconnect = o.minted_age = true; }},
    {"X-born-alone-restart", breaks(NEVER, 15602), [](O& o) { o.restart = true; }},
    {"X-born-alone-fail-over", breaks(NEVER, 6829), [](O& o) { o.fail_over = true; }},
    {"X-ttl-restart", breaks(NEVER, 49182), [](O& o) { o.restart = o.born_has_ttl = true; }},
    {"X-ttl-reassert-restart", breaks(NEVER, 43762),
     [](O& o) { o.restart = o.born_has_ttl = o.reassert_on_reconnect = true; }},
    {"X-ttl-reassert-fail-over", breaks(NEVER, 16605),
     [](O& o) { o.fail_over = o.born_has_ttl = o.reassert_on_reconnect = true; }},
    {"X-ttl-reassert-minted", breaks(NEVER, 109596),
     [](O& o) {
       o.fail_over = o.restart = o.born_has_ttl = o.reassert_on_reconnect = o.minted_age = true;
       o.faults = 3;
     }},
};

int main(int argc, char** argv) { return run_variants(argc, argv, VARIANTS); }
