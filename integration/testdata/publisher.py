"""A libzmq publisher that sends what it is told to.

Prints the endpoint that it is bound to, then "subscribed" for each subscription. Each line of its standard input is
a JSON list of frames as hex digits, which go out as one message.
"""
import json
import sys
import threading

import zmq

context = zmq.Context()
socket = context.socket(zmq.XPUB)
port = socket.bind_to_random_port("tcp://127.0.0.1")
print(f"tcp://127.0.0.1:{port}", flush=True)

# Sockets are not for sharing between threads: standard input reaches this one through a pipe.
inbox = context.socket(zmq.PULL)
inbox.bind("inproc://stdin")


def forward():
    outbox = context.socket(zmq.PUSH)
    outbox.connect("inproc://stdin")
    for line in sys.stdin:
        outbox.send_string(line)
    outbox.send_string("")


threading.Thread(target=forward, daemon=True).start()
poller = zmq.Poller()
poller.register(socket, zmq.POLLIN)
poller.register(inbox, zmq.POLLIN)
while True:
    ready = dict(poller.poll())
    if socket in ready and socket.recv()[:1] == b"\x01":
        print("subscribed", flush=True)
    if inbox in ready:
        line = inbox.recv_string()
        if not line:
            break
        socket.send_multipart([bytes.fromhex(frame) for frame in json.loads(line)])
