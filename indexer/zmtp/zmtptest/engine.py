"""A publisher on the real libzmq, driven line by line over stdin (JSON in, JSON out).

argv: PUB endpoint, ROUTER endpoint or "-", replay layout (v1 | v2), socket (pub | xpub).
An xpub speaks the same wire protocol as a pub and can say when a subscription has arrived.

in:  {"op": "publish", "seq": n, "payload": hex, "topic": s?, "drop": bool?, "burn": bool?}
     drop: kept for replay but not sent live; burn: neither
     {"op": "raw", "frames": [hex, ...]}     {"op": "flood", "count": n, "size": n}
     {"op": "bind", "endpoint": s}
     {"op": "replay", "skip": [seq...], "end": bool, "answer": bool, "first": n}
out: {"pub": endpoint, "router": endpoint}, then {"done": op} per line in,
     {"subscribed": topic} (xpub), {"asked": start} per replay request
"""
import json
import os
import struct
import sys
import time

import zmq

END = b"\xff" * 8


def bind(socket, endpoint):
    socket.setsockopt(zmq.LINGER, 0)
    for attempt in range(200):
        try:
            socket.bind(endpoint)
            return socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        except zmq.ZMQError as e:
            if e.errno != zmq.EADDRINUSE or attempt == 199:
                raise
            time.sleep(0.05)


def say(**words):
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def main():
    pub_endpoint, router_endpoint, layout, kind = sys.argv[1:5]
    context = zmq.Context()
    pub = context.socket(zmq.XPUB if kind == "xpub" else zmq.PUB)
    if kind == "xpub":
        pub.setsockopt(zmq.XPUB_VERBOSE, 1)
    pub.setsockopt(zmq.SNDHWM, 100000)
    bound = {"pub": bind(pub, pub_endpoint), "router": ""}
    poller = zmq.Poller()
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    router = None
    if router_endpoint != "-":
        router = context.socket(zmq.ROUTER)
        bound["router"] = bind(router, router_endpoint)
        poller.register(router, zmq.POLLIN)
    if kind == "xpub":
        poller.register(pub, zmq.POLLIN)
    say(**bound)

    kept, how, pending = [], {"skip": [], "end": True, "answer": True, "first": 0}, b""
    while True:
        ready = dict(poller.poll())
        if kind == "xpub" and pub in ready:
            word = pub.recv()
            if word[:1] == b"\x01":
                say(subscribed=word[1:].decode())
        if router is not None and router in ready:
            frames = router.recv_multipart()
            if len(frames) == 3:
                start = int.from_bytes(frames[2], "big")
                if how["answer"]:
                    for topic, seq, payload in kept:
                        if seq >= max(start, how["first"]) and seq not in how["skip"]:
                            head = [frames[0], b""] + ([topic] if layout == "v2" else [])
                            router.send_multipart(head + [struct.pack(">Q", seq), payload])
                    if how["end"]:
                        head = [frames[0], b""] + ([b""] if layout == "v2" else [])
                        router.send_multipart(head + [END, b""])
                say(asked=start)
        if sys.stdin.fileno() in ready:
            data = os.read(sys.stdin.fileno(), 1 << 20)
            if not data:
                return
            pending += data
            *lines, pending = pending.split(b"\n")
            for line in lines:
                c = json.loads(line)
                if c["op"] == "publish":
                    topic, payload = c.get("topic", "").encode(), bytes.fromhex(c["payload"])
                    if not c.get("burn"):
                        kept.append((topic, c["seq"], payload))
                        if not c.get("drop"):
                            pub.send_multipart([topic, struct.pack(">Q", c["seq"]), payload])
                elif c["op"] == "raw":
                    pub.send_multipart([bytes.fromhex(f) for f in c["frames"]])
                elif c["op"] == "flood":
                    for i in range(c["count"]):
                        pub.send_multipart([b"", struct.pack(">Q", i), bytes(c["size"])])
                elif c["op"] == "bind":
                    bind(pub, c["endpoint"])
                elif c["op"] == "replay":
                    how.update({k: v for k, v in c.items() if k != "op"})
                say(done=c["op"])


main()
